"""Claims of the papers, tried at a size that runs here: vitlab reproduce."""
