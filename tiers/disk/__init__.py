"""The disk tier: an LMDB index over slab files of fixed slots.

From the outside in: `store` (the verbs), `vault` (what one process shares per folder), `room`
(who gets a slot), `index` (the transactional index), `slab` (the bytes), `owner` and `folder`
(who uses the folder, and what it may be).
"""
