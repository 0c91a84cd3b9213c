"""Data sources: one file per kind, each giving `Splits`; `vitlab.images.datasets` opens them."""

SOURCES = {  # name -> file and function of this package, called with (name, path, download)
    "digits": "digits.open_digits",
    "fashion-mnist": "idx.open_idx",
    "mnist": "idx.open_idx",
    "cifar10": "cifar.open_cifar",
    "cifar100": "cifar.open_cifar",
}
