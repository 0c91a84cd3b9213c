"""What a model sees and does, shown through Trace."""
