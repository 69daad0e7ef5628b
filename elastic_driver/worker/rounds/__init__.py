"""This worker's place in the job: its current round, the next one it waits for, and its link to the driver."""
