"""What the processes of a run share: supervisor, scratch folders, locks, checkpoint clean-up, logs, stack reports."""
