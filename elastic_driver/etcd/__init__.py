"""etcd, where a job's journal may lie and where its agents look for the driver (docs/decisions/0044)."""
