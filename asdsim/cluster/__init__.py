"""Work spread over a Ray cluster: one actor for each replica of the models. This room schedules and does nothing else.

The driver needs no GPU and holds no model. It deals out requests, a few at a time; a replica decodes, covers or walks
them and writes their shards to storage that all nodes share. Only rows of the manifest and sums go through Ray. What is
lost with a replica, its node or the driver is what the replicas were at.
"""
