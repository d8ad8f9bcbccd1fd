"""Does the conformance kit find broken stores? Mutants of stores, each with one defect.

    python -m tests.mutants [--part 1/4] [--only WORDS] [--store template]

Each is run in a process of its own, which the kit's first failure ends. What is printed says which
test caught which mutant, and how many of each kind were caught.
"""
