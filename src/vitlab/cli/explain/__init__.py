"""vitlab explain VERB CHECKPOINT IMAGE...: pictures of what a model sees, and their numbers."""
