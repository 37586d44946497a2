"""The look before training, and OpenCLIP's flags for a source."""
