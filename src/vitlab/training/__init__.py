"""Training: recipe -> data, model, objective -> run folder."""
