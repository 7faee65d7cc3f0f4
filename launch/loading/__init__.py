"""`launch.load_test`: what a server does under load, as its clients see it."""
