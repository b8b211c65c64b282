"""Devices as a resource: tags and plans, lending, memory, and the books of where every device-second went."""
