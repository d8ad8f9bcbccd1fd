"""Several connectors behind the contract of one."""
