"""What two families of runs differ in, and how surely."""
