"""`planc show`: a plan as one page that needs nothing else, as a picture, and in notebooks."""
