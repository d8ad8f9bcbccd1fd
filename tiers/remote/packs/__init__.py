"""Packs: blocks of one prefix kept together, as stores of whole objects and whole files want it.

A store that answers in milliseconds can't be asked for each block. So the blocks of a prompt are
parted into groups of `pack_blocks` (`pack.blocks_of_pack`), and those of one group lie in one pack,
one object or file, as far as one `put` brought them.

- **Name.** A pack is named by the key of its first block (`pack.name_of`). A key is a digest of all
  that comes before it, so one pack that is there stands for the prefix before it: a look-up needs
  no index, no listing and no clock, and asks for the first block of some groups, head first.
- **Form** (`pack`). An index of fixed length, which has a digest of each block's key; then records
  as of every tier (`tiers.block`), each of which proves which block it is. All lengths are known
  before a read, so a block is read by one range, without a question first.
- **Prompts that part.** A pack that has other blocks than ours from some number on ends there for
  us: our next block begins another pack, under its own key, and so on. So packs form a tree, a
  block is stored once, and a block that comes alone, as in an answer, is a pack of one.
- **Windows.** Of an attention window any block may be missing: of a prefix that it has loaded an
  engine has the end alone. Its packs begin wherever a put did, in the midst of a group, too. So for
  whatever is in no pack from the head on each block is asked for, all at once. A put does not, and
  may store a block twice: it would read as much for each block of an answer.
- **Never changed.** A pack is put whole, and only if its name is free (`Bucket.put`); who comes
  second reads what is there. It goes when one of its blocks is damaged or dropped, or by age.

`PackStore` is the TierStore over any `Bucket`: whole puts, reads of a range, deletes, a listing.
Its threads call the bucket, many at once. What is another place for packs writes a Bucket alone:
`object/obstore_bucket.py` beside is one. A Bucket raises TierUnavailable, or OSError, where it
can't answer; what is absent is None or False, and no error. Each call must end by itself, in about
the tier's `timeout`: a verb waits for all that it began, since they write into the caller's memory.
"""
