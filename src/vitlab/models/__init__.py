"""One paper, one file: config, variant table, parts, model, loss."""
