"""Operations whose memory is on a device: NCCL groups, their lane, and the arithmetic there."""
