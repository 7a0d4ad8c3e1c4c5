module atoll.local/native

go 1.26
