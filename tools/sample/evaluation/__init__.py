"""How far a set of images is from a reference: Fréchet distance, KID, CMMD, precision, recall, CLIP score."""
