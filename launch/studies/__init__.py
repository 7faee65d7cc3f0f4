"""Studies of rules and theory: each a command, `launch.studies.X`."""
