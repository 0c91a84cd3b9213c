"""The `vitlab` command. Only this package prints."""
