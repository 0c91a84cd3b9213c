"""One question, one command, one plot: many training runs, made from a recipe and set side by side."""
