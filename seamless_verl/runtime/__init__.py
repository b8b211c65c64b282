"""What a run's processes need around them: supervisor, scratch folders, locks, logs."""
