"""The site of the documents: what MkDocs does besides its settings, and how pages look."""
