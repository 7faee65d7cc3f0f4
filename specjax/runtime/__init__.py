"""What runs a decoder: engine, compilation, timing, devices, host stops."""
