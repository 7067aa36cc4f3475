"""Ways to reach a loss sooner (REPA, SRA, TREAD, ...), one file each; ``registry.py`` lists them."""
