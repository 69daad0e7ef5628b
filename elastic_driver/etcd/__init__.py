"""etcd, which may hold a job's journal, and where its agents look for the driver (docs/decisions/0044)."""
