"""One loop for every method: recipe -> data, model, objective -> run folder."""
