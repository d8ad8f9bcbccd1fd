"""The disk tier: an LMDB index over slab files of fixed slots.

`disk_store` has the verbs, and `slab` moves the bytes. `index` has the transactional index
(`index`, `edit`), who gets a slot (`slot_allocator`), and lookups from memory
(`fingerprint_index`). `folder` has what one process shares per folder (`open_folders`,
`open_folder`), its work in the background (`upkeep`), what the folder may be (`folder`), who has it
open (`owner`), and whether the index is as it was closed (`clean_close`).
"""
