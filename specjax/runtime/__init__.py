"""Running a decoder: engine, compilation, meshes, stop strings."""
