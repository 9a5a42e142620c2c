"""What an objective's code says about its Hessian: stand-ins for tensors, and certificates from them."""
