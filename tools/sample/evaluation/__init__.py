"""How far a set of pictures is from a reference: Fréchet distance, KID, CMMD, precision, recall, CLIP score."""
