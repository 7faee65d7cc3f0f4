"""Running a decoder: engine, compilation, timing, meshes, stop strings."""
