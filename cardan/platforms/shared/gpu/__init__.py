"""What platforms share whose devices torch drives through ``torch.cuda``, whoever makes them."""
