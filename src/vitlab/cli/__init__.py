"""The `vitlab` command: verb -> module, imported on use. Only this package prints."""
