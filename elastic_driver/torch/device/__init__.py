"""Operations on device memory: NCCL groups, their lane, and the arithmetic on devices."""
