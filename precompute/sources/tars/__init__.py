"""WebDataset shards and the tars of ImageNet."""
