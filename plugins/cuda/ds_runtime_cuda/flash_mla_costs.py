"""What pieces of a sequence cost FlashMLA: flash_mla_plan.py and its form for a device count so."""

BLOCK, PAIR = 64, 2  # keys; blocks that the kernel takes at a time
TRIED = 32  # sizes of parts
# Nanoseconds on an H200 (fitted to 20 batches of 128 heads, benchmarks/results/device_decode.md).
BLOCK_NS, PIECE_OF_ONE_NS, PIECE_OF_ALL_NS = 1600, 320, 80
PIECE = 3  # what a piece costs beside its blocks, in blocks
HEADS = 128  # that PIECE_OF_ALL_NS is for: it is the writing and reading of their sums
