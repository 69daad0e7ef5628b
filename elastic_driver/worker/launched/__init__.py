"""Jobs that mpirun or srun has started: no driver, the same ranks from beginning to end, rank 0 serves them."""
