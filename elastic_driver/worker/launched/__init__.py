"""Jobs started by mpirun or srun: no driver, the same ranks from beginning to end, served by rank 0."""
