"""Training the extractor: records to read, samples to make of them, the loss and the loop."""
