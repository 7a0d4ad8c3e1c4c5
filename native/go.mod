module atoll.local/native

go 1.26.0

require (
	github.com/golang-jwt/jwt/v5 v5.3.1
	golang.org/x/net v0.62.0 // indirect
	golang.org/x/sys v0.50.0
)
