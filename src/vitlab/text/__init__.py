"""Words -> token numbers, for the models that read them."""
