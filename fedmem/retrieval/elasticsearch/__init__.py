"""The retrieval engine on an Elasticsearch server, through its official client."""
