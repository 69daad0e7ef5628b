"""This worker's place in the job: the round it is in, the one it waits for, and the driver it listens to."""
