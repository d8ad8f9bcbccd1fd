"""The disk tier: an LMDB index over slab files of fixed slots.

From the outside in: `store` (the verbs), `registry` and `open_folder` (what one process shares per
folder), `upkeep` and `uses` (its work in the background), `slot_allocator` (who gets a slot),
`index`, `edit` and `rows` (the transactional index), `fingerprint_index` (lookups from memory),
`slab` (the bytes). A process opens a folder by `opening`, with `folder` and `mounts` (what the
folder may be), `owner` (who has it open), `clean_close` (whether the index is as it was closed) and
`repair` (what dead processes left).
"""
