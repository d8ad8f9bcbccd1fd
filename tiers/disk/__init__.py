"""The disk tier: an LMDB index over slab files of fixed slots.

`store` has the verbs, and `slab` moves the bytes. `index` has the transactional index (`index`,
`environment`, `edit`, `rows`), who gets a slot (`slot_allocator`), and lookups from memory
(`fingerprint_index`). `folder` has what one process shares per folder (`registry`, `open_folder`)
and its work in the background (`upkeep`, `keeping`). A process opens a folder by `opening`, with
`folder` and `mounts` (what the folder may be), `owner` (who has it open), `clean_close` (whether
the index is as it was closed) and `repair` (what dead processes left).
"""
