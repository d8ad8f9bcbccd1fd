"""The disk tier: an LMDB index over slab files of fixed slots.

From the outside in: `store` (the verbs), `vault` and `vaults` (what one process shares per folder),
`upkeep` (what it does for the folder in the background), `room` (who gets a slot), `index` (the
transactional index), `slab` (the bytes), `opening`, `owner`, `folder` and `mounts` (how a process
comes in, who is there, and what the folder may be).
"""
