"""The forms: `DataParallel`, `replicate` and `fully_shard`, each with what it keeps between calls."""
