"""Low-rank adapters: what a folder holds, and the slots on the device."""
