"""Where pictures come from: one file per kind of source, each giving `Splits`; `vitlab.images.datasets` opens them."""

SOURCES = ("digits", "fashion-mnist", "mnist", "cifar10", "cifar100")  # by name
