"""The engines: mesh, collectives, tensor, pipeline and data parallel."""
