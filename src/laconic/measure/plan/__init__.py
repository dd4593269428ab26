"""What pays here: links, steps and codecs measured, and what follows from them."""
