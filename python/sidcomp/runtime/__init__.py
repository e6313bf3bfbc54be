"""One step of one model: buckets in, averaged gradients out."""
